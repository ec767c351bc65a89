"""What README, "In your own codebase", has a reader write into a checkout; test_foreign_checkouts.py writes that."""

# train.py: the line after which ours goes, and ours.
TWO_LINES = (
    ("from dassl.engine import build_trainer", "import trainers.dear"),
    ("    extend_cfg(cfg)", "    trainers.dear.extend_cfg(cfg)"),
)
# MMRL's train.py merges values of its own by trainer name and refuses every other name.
MMRL_GUARD = ("    cfg.merge_from_list(get_dataset_specified_config(",
              '    if cfg.TRAINER.NAME.startswith("MMRL"): cfg.merge_from_list(get_dataset_specified_config(')
# trainers/coop.py: their CoOp on a RoleCLIP.
IMPORT = ("from clip import clip", "from dear_plugin import wrap_clip_with_roles")
WRAP = ("        clip_model = load_clip_to_cpu(cfg)",
        '        clip_model = wrap_clip_with_roles(clip_model, roles="openai_vit_b16")')
# ... and with the adapter trained and saved beside the context.
TRAIN_ADAPTER = (
    ("        self.optim = build_optimizer(self.model.prompt_learner, cfg.OPTIM)",
     "        self.optim = build_optimizer(\n"
     "            [*self.model.prompt_learner.parameters(), *clip_model.trainable_parameters()], cfg.OPTIM)"),
    ('        self.register_model("prompt_learner", self.model.prompt_learner, self.optim, self.sched)',
     '        self.register_model("dear_adapter", clip_model.adapter)'),
)
