"""Windows nodes: an unmodified kube-proxy.exe under Wine, with a simulated Host Networking Service, against ours."""
