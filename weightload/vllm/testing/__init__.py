"""Small random checkpoints, an engine probe and weight streams for tests of a live vLLM engine.

`families` writes the checkpoints, `probe` starts an engine and records what it computes, and
`sources` turns a checkpoint into the streams that loaders have to cope with. Nothing here imports
vLLM before an engine is started.
"""
