"""Several processes that train one model: their process groups, and layers that run on shards of DTensors."""
