"""The commands around megadapo.lab: benchmarks, profiles, plans, simulations, ablations."""
