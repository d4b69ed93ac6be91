"""Connect the ranks of a gang: rendezvous, collectives, number formats on the wire, failure detection."""
