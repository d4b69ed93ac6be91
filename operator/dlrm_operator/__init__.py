"""Control plane: a kopf operator that turns DLRMJobs into trainer pods and keeps them alive."""
