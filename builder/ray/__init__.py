"""Import paths that Serve configurations of versions up to 0.3.0 name; the code is in builder.clusters.ray."""
