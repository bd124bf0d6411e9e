"""What happens in a tenant's sessions, for readers that watch: streams of notices, counts of late."""
