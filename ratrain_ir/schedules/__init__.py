"""Pipeline schedules as bare orders of forwards and backwards, and what is known of them."""
