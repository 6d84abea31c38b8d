"""The demo: a swarm of simulated agents, a consumer that is killed on the way, and a proof that nothing was lost.

Part of the composition root, as ``walstream.cli`` is: it wires the other packages together and nobody imports it. The
consumer's side (``consumer``) uses the public names alone, as a user's own module would.
"""
