"""The page that draws the logs of runs, and the reader of growing logs."""
