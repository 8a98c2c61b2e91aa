"""`python -m onnxtrain.compat script.py`: run a script with onnxtrain as `onnxruntime.training`."""

import sys

from onnxtrain.compat.run import main

main(sys.argv[1:])
