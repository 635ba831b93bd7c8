"""The second run of a checkpointed region: it decides as the first run did, and leaves the state of modules alone."""
