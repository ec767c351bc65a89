# Shared by the protocol scripts: where things are, and which trainer and config a call means. Sourced, not run.
#   usage in a script: parse_call DATASET SEED [--trainer NAME] [--cfg STEM] [--shots K] [flags of train.py] [KEY VALUE ...]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/../.."
DATA="${DATA:-$PWD/data}"
if [ -n "${PYTHON:-}" ]; then :; elif [ -x .venv/bin/python ]; then PYTHON=.venv/bin/python; else PYTHON=python; fi

default_cfg() { # the method's published config for base to new; shapes is made for the shipped backbone
  case $DATASET in shapes*) echo tiny; return ;; esac
  case $TRAINER in
    CoOp) if [ "$DATASET" = imagenet ]; then echo vit_b16_ep50_ctxv1; else echo vit_b16_ctxv1; fi ;;
    CoCoOp) echo vit_b16_c4_ep10_batch1_ctxv1 ;;
    MaPLe) echo vit_b16_c2_ep5_batch4_2ctx ;;
    PromptSRC) echo vit_b16_c2_ep20_batch4_4+4ctx ;;
    *) if [ "$DATASET" = imagenet ] && [ -f "configs/trainers/$TRAINER/vit_b16_imagenet.yaml" ]; then
        echo vit_b16_imagenet
      else echo vit_b16; fi ;;
  esac
}

cfg_for() { # PROTOCOL: the config that a method has for it, e.g. *_cross_datasets.yaml, else that for base to new
  local kind=
  case $1 in xd | dg | source) kind=cross_datasets ;; fewshot) kind=few_shot ;; esac
  case $DATASET in shapes*) kind= ;; esac
  if [ "$kind$DATASET" = few_shotimagenet ] && [ -f "configs/trainers/$TRAINER/vit_b16_imagenet.yaml" ]; then
    kind=  # as MMRL's few-shot script: on ImageNet its config for ImageNet
  fi
  if [ -n "$kind" ]; then
    for file in "configs/trainers/$TRAINER/"*"_$kind.yaml"; do
      if [ -f "$file" ]; then basename "$file" .yaml; return; fi
    done
  fi
  default_cfg
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
  GIVEN_CFG=$CFG
  CFG=${CFG:-$(cfg_for "${PROTOCOL:-base2new}")}
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
    DATASET.NUM_SHOTS "$SHOTS" DATASET.SUBSAMPLE_CLASSES "$classes" PROTOCOL "${PROTOCOL:-base2new}"
}

test_transfer() { # TARGET SEED [flags]: the model is that of the source data set: $SOURCE, else imagenet or shapes
  parse_call "$@"
  local target=$DATASET source=imagenet extra=(--eval-only)
  case $DATASET in shapes*) source=shapes ;; esac
  DATASET=${SOURCE:-$source}
  if [ -z "$GIVEN_CFG" ]; then CFG=$(cfg_for source); fi
  if [ "$TRAINER" != ZeroshotCLIP ]; then extra+=(--model-dir "$(output_folder source)"); fi
  DATASET=$target
  run_train "$(output_folder "$PROTOCOL")" all "${extra[@]}"
}
