"""`--mode shard`: a folder of images becomes a dataset of shards."""
