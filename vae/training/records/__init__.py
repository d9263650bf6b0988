"""What a run measures about itself while it trains, and what it prints."""
