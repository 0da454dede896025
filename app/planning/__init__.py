"""Planning: draft, catalogue, planner process."""
