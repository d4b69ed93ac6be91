"""dlrmctl: the command line of dlrm-operator."""
