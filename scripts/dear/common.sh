# Shared by the protocol scripts: where things are, and which trainer and config a call means. Sourced, not run.
#   usage in a script: parse_call DATASET SEED [--trainer NAME] [--cfg STEM] [--shots K] [flags of train.py] [KEY VALUE ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
DATA="${DATA:-$PWD/data}"
if [ -n "${PYTHON:-}" ]; then :; elif [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; else PYTHON=python; fi

default_cfg() { # the method's published config for this data set; shapes is made for the shipped backbone
  local imagenet=no
  if [ "$DATASET" = imagenet ]; then imagenet=yes; fi
  if [ "$DATASET" = shapes ]; then echo tiny
  elif [ "$TRAINER" = CoOp ] && [ $imagenet = yes ]; then echo vit_b16_ep50_ctxv1
  elif [ "$TRAINER" = CoOp ]; then echo vit_b16_ctxv1
  elif [ $imagenet = yes ] && [ -f "configs/trainers/$TRAINER/vit_b16_imagenet.yaml" ]; then echo vit_b16_imagenet
  else echo vit_b16; fi
}

parse_call() {
  if [ $# -lt 2 ]; then
    echo "usage: bash $0 DATASET SEED [--trainer NAME] [--cfg STEM] [--shots K] [flags of train.py] [KEY VALUE ...]" >&2
    exit 2
  fi
  DATASET=$1 SEED=$2 TRAINER=DeAR CFG= SHOTS=16 REST=()
  shift 2
  while [ $# -gt 0 ]; do
    case $1 in
      --trainer | --cfg | --shots)
        if [ $# -lt 2 ]; then echo "$1 wants a value" >&2; exit 2; fi
        case $1 in --trainer) TRAINER=$2 ;; --cfg) CFG=$2 ;; --shots) SHOTS=$2 ;; esac
        shift 2 ;;
      *) REST+=("$1"); shift ;;
    esac
  done
  CFG=${CFG:-$(default_cfg)}
}

output_folder() { # PROTOCOL-FOLDER, e.g. base2new/train_base
  echo "output/$1/$DATASET/shots_$SHOTS/$TRAINER/$CFG/seed$SEED"
}

run_train() { # OUTPUT-FOLDER CLASSES [more flags]; what the caller gave comes last, since KEY VALUE pairs must
  local folder=$1 classes=$2
  shift 2
  "$PYTHON" scripts/train.py --root "$DATA" --seed "$SEED" --trainer "$TRAINER" \
    --dataset-config-file "configs/datasets/$DATASET.yaml" --config-file "configs/trainers/$TRAINER/$CFG.yaml" \
    --output-dir "$folder" "$@" ${REST[@]+"${REST[@]}"} \
    DATASET.NUM_SHOTS "$SHOTS" DATASET.SUBSAMPLE_CLASSES "$classes"
}
