"""A model that is cut into stages, one a rank; a plug-in."""
