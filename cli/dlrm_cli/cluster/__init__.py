"""``dlrmctl`` against a cluster: jobs looked at, followed, stopped and set going again."""
