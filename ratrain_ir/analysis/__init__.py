"""Facts derived from op lists: lifetimes, dependences, progress. No module is changed here."""
