"""Is a deployment as it must be, and what to mend: `sao doctor`. `edges` and `checks` are pure, `probes` ask."""
