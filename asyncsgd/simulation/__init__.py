"""What only virtual time needs: problems with exact answers, drawn times, methods without a server."""
