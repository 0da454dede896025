"""Planning: the draft recipe, the catalogue of models and the process that plans."""
