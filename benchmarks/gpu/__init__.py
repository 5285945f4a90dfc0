"""Rows G1 to G9: reloads on one GPU, beside an emulation of vLLM's layerwise reload.

python -m benchmarks.gpu                       # everything that this machine can run
python -m benchmarks.gpu --rows G1 G2 --scale 0.25
python -m benchmarks.gpu.calibrate             # the emulation beside vLLM itself, on the CPU
"""
