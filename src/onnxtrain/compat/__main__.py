"""`python -m onnxtrain.compat script.py`."""

import sys

from onnxtrain.compat import main

main(sys.argv[1:])
