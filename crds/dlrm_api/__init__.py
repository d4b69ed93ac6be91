"""The API of dlrm-operator: the models of its CRDs, and the types that cross a boundary."""
