"""Files in the folder of a run that other commands read, too. Needs no PyTorch."""

RUN_COMMAND = "train"  # in the marker of the folder
METRICS_NAME = "metrics.jsonl"
RUN_NAME = "run.json"  # which run is the last one; it is written first and last
OTHER_DATA = "other data"  # in a record `run`: the run goes on with other images or transforms
