"""A stand-in GPU: the unmodified CUDA build of torch on a machine without one. It allocates to the byte and computes nothing.

python -m standin_gpu build --site VENV/lib/python3.11/site-packages --out LIBRARIES
python -m standin_gpu run --libraries LIBRARIES --gpu rtx-4090 -- python train.py

README.md has its uses and limits. It imports no other package of this repository.
"""
