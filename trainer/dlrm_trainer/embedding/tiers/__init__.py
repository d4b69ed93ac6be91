"""Keep rows of large tables in a hierarchy: slots that kernels compute on, and slower levels below."""
