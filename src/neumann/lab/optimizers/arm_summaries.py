"""A line about each optimizer of the lab, for `--opt help`."""

ARM_SUMMARIES = {
    "neumann": "the paper's form, Algorithm 2",
    "neumann-spectral": "for large batches; weight_decay=auto is the recipe",
    "neumann-diagonal": "scales each weight, as Adam does",
    "sgd": "Nesterov momentum 0.9",
    "rmsprop": "torch's, with momentum",
    "rmsproptf": "as TensorFlow defines it",
    "adam": "weight decay through the gradient",
    "adamw": "weight decay beside the gradient",
    "nadam": "Adam with Nesterov momentum",
    "nadamw": "AdamW with Nesterov momentum",
    "lars": "scales the step of each layer, after SGD",
    "lamb": "scales the step of each layer, after Adam",
    "muon": "orthogonalizes matrices; AdamW for the rest",
    "normuon": "Muon, scaled row by row",
    "soap": "Adam in the eigenbasis of Shampoo",
    "schedulefree": "AdamW that averages in place of a schedule",
    "idealized": "the paper's Algorithm 1: several gradients a step",
    "cg": "Newton's method with conjugate gradients",
}
