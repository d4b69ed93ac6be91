"""``dlrmctl report``: one page about one run."""
