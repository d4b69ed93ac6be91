"""``dlrmctl run``: train a job on this machine."""
