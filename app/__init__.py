"""Web page: plan, start and watch runs."""
