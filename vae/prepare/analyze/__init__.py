"""`--mode analyze`: statistics of a set as JSON and as an HTML page."""
