"""`--mode index`: tar files that others wrote become a dataset of shards, where they are."""
