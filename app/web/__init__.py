"""The web server: access, limits and page filter."""
