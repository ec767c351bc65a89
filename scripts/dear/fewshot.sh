#!/usr/bin/env bash
# Train with 1, 2, 4, 8, 16 images a class on all classes. Example: bash scripts/dear/fewshot.sh dtd 1 --trainer CoOp
exec bash "$(dirname "$0")/protocol.sh" fewshot "$@"
