#!/usr/bin/env bash
# DeAR without one of its parts each, base to new. Example: bash scripts/dear/ablation.sh shapes 1
exec bash "$(dirname "$0")/protocol.sh" ablation "$@"
