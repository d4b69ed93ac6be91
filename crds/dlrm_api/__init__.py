"""The API of dlrm-operator: the models its CRDs are generated from, and the types that cross a boundary."""
