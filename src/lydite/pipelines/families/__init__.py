"""One module for each family; `lydite.pipelines.family` finds them."""
