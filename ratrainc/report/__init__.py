"""Reports about modules, programs and simulations: pages, pictures, tables and texts."""
