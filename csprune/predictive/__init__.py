"""The predictive subspaces of the readout: what the prediction reads at each site of the last layers."""
