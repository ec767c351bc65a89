"""The contract's configuration keys that CLIP trainers meet, with Dassl's defaults (dassl_contract.md, section 3)."""

from __future__ import annotations

from typing import Any

_TRAIN_LOADER = {"SAMPLER": "RandomSampler", "BATCH_SIZE": 32, "N_DOMAIN": 0, "N_INS": 16}

_INPUT: dict[str, Any] = {
    "SIZE": (224, 224),  # height, width
    "INTERPOLATION": "bilinear",
    "TRANSFORMS": (),
    "NO_TRANSFORM": False,
    "PIXEL_MEAN": [0.485, 0.456, 0.406],
    "PIXEL_STD": [0.229, 0.224, 0.225],
    "CROP_PADDING": 4,
    "RRCROP_SCALE": (0.08, 1.0),
    "CUTOUT_N": 1,
    "CUTOUT_LEN": 16,
    "GN_MEAN": 0.0,
    "GN_STD": 0.15,
    "RANDAUGMENT_N": 2,
    "RANDAUGMENT_M": 10,
    "COLORJITTER_B": 0.4,
    "COLORJITTER_C": 0.4,
    "COLORJITTER_S": 0.4,
    "COLORJITTER_H": 0.1,
    "RGS_P": 0.2,  # probability of grey
    "GB_P": 0.5,  # probability and kernel of the blur
    "GB_K": 21,
}

_DATASET: dict[str, Any] = {
    "ROOT": "",
    "NAME": "",
    "SOURCE_DOMAINS": (),
    "TARGET_DOMAINS": (),
    "NUM_LABELED": -1,
    "NUM_SHOTS": -1,  # < 1: the full train set
    "VAL_PERCENT": 0.1,
    "STL10_FOLD": -1,
    "CIFAR_C_TYPE": "",
    "CIFAR_C_LEVEL": 1,
    "ALL_AS_UNLABELED": False,
}

_OPTIM: dict[str, Any] = {
    "NAME": "adam",
    "LR": 0.0003,
    "WEIGHT_DECAY": 5e-4,
    "MOMENTUM": 0.9,
    "SGD_DAMPNING": 0,
    "SGD_NESTEROV": False,
    "RMSPROP_ALPHA": 0.99,
    "ADAM_BETA1": 0.9,
    "ADAM_BETA2": 0.999,
    "STAGED_LR": False,
    "NEW_LAYERS": (),
    "BASE_LR_MULT": 0.1,
    "LR_SCHEDULER": "single_step",
    "STEPSIZE": (-1,),
    "GAMMA": 0.1,
    "MAX_EPOCH": 10,
    "WARMUP_EPOCH": -1,
    "WARMUP_TYPE": "linear",
    "WARMUP_CONS_LR": 1e-5,
    "WARMUP_MIN_LR": 1e-5,
    "WARMUP_RECOUNT": True,
}

DEFAULTS: dict[str, Any] = {
    "VERSION": 1,
    "OUTPUT_DIR": "./output",
    "RESUME": "",
    "SEED": -1,  # negative: no seeding
    "USE_CUDA": True,
    "VERBOSE": True,
    "INPUT": _INPUT,
    "DATASET": _DATASET,
    "DATALOADER": {
        "NUM_WORKERS": 4,
        "K_TRANSFORMS": 1,  # augmented views of a train image
        "RETURN_IMG0": False,
        "TRAIN_X": _TRAIN_LOADER,
        "TRAIN_U": {"SAME_AS_X": True, **_TRAIN_LOADER},  # accepted; no unlabelled loader here
        "TEST": {"SAMPLER": "SequentialSampler", "BATCH_SIZE": 32},  # val too
    },
    "MODEL": {
        "INIT_WEIGHTS": "",
        "BACKBONE": {"NAME": "", "PRETRAINED": True},
        "HEAD": {"NAME": "", "HIDDEN_LAYERS": (), "ACTIVATION": "relu", "BN": True, "DROPOUT": 0.0},
    },
    "OPTIM": _OPTIM,
    "TRAIN": {"CHECKPOINT_FREQ": 0, "PRINT_FREQ": 10, "COUNT_ITER": "train_x"},
    "TEST": {
        "EVALUATOR": "Classification",
        "PER_CLASS_RESULT": False,
        "COMPUTE_CMAT": False,
        "NO_TEST": False,
        "SPLIT": "test",
        "FINAL_MODEL": "last_step",  # or best_val
    },
    "TRAINER": {"NAME": ""},
}
