"""What an engine tells of itself: its requests' spans, its metrics, its cache's events."""
