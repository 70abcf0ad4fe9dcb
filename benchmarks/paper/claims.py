"""The 28 claims of the paper, in our words, and how each is judged. Fixed before any run.

Every claim says what it takes to call it supported, and the effect whose exclusion makes it not
supported. A claim without a size is read as at least 0.2 points, the margin within which we call
two things equal. CLAIMS_ON_TEST_SET is the list over which p values are corrected. Changing
anything here after a study has run has to be said in docs/paper.md.
"""

from dataclasses import dataclass

from benchmarks.paper.claim_tests import (
    MARGIN,
    ClaimTest,
    Contrast,
    Equivalence,
    Source,
    Spread,
    get_log_train_loss,
    get_loss,
    lose_at_most,
    measure_early_drops,
)
from benchmarks.paper.judging import Verdict
from benchmarks.paper.length_tests import (
    BATCHES,
    LONGEST,
    TARGET_EPOCHS,
    AdvantageByBatch,
    EpochsToAccuracy,
    StepsSaved,
    list_lengths,
)
from benchmarks.paper.run_lines import name_point
from benchmarks.paper.settled import (
    RACE,
    Measure,
    compare_cost_with_adam,
    compare_forces,
    count_negative,
    follow_smallest,
    judge_growth,
    race_conjugate_gradients,
    state,
)

# Of the paper's Tables 2 and 4: the least gain, in points and as a share of the baseline's error.
GAIN, GAIN_SHARE = 0.8, 0.038
FORCES_GAIN, FORCES_SHARE = 0.5, 0.021
PLAIN_GAIN, PLAIN_SHARE = 0.8, 0.033
WORTH_TUNING = GAIN / 2  # points, for which one would tune another option
LARS_LOSS, LARS_SHARE = 0.4, 0.016  # the least that the paper says of LARS
EPOCH_FACTOR = 258 / 226  # the largest ratio in the paper's Table 3
LOSS_MARGIN = 0.22  # of the logarithm of the training loss: 20 %
NATS_MARGIN = 0.01
INTERVALS = ("2.2", "4.4", "8.8")  # % of a run, the first K
BASELINES = ("nesterov", "rmsprop")
MAIN = ("main-cifar10", "main-cifar100")
LARGE = 2048  # 4 % of CIFAR-10; the paper's largest batch is 2.5 % of ImageNet
LARGER = tuple(batch for batch in BATCHES if batch > LARGE)
SAVED = 0.1  # of the steps, the least that claim 4 promises
SHARES = {54: "90%", 48: "80%", 42: "70%"}  # of the epochs of a whole run, in shorter-runs


@dataclass(frozen=True)
class Claim:
    number: int
    title: str
    says: str  # what the paper says, in our words
    where: str  # in the paper
    run: str  # what is run here
    rule: str  # when it is supported, and the effect that has to be excluded to reject it
    tests: tuple[ClaimTest, ...] = ()  # all of them touch the test set
    measure: Measure | None = None  # for claims that no test over seeds decides
    measured: tuple[Source, ...] = ()  # runs of studies that it looks at
    limits: str = ""  # what to know before using the verdict
    beside: tuple[ClaimTest, ...] = ()  # shown with the result; they have no part in the verdict

    @property
    def touches_test_set(self) -> bool:
        return bool(self.tests)


def _scaling(arm: str, batch: int) -> Source:
    return Source("scaling", arm, name_point(batch_size=batch))


def _shortened() -> dict[int, Source]:
    """Runs by their epochs, in the study shorter-runs."""
    shares = SHARES | {LONGEST: "100%"}
    return {n: Source("shorter-runs", f"neumann {share}") for n, share in shares.items()}


def _by_batch(arm: str) -> dict[int, Source]:
    small = {128: Source("small-batch", arm)}
    return small | {batch: _scaling(arm, batch) for batch in BATCHES if batch <= LARGE}


CLAIMS = (
    Claim(
        1,
        "Large batches without loss",
        "Batches of up to 32,000 images train a model as good as the baseline's.",
        "abstract, Table 3, Figure 3",
        "`studies/paper/scaling.toml`: Neumann at 2,048 and Nesterov SGD at 512",
        "Supported if Neumann loses less than 0.2 points; not supported if it loses more.",
        (lose_at_most(MARGIN, _scaling("neumann", LARGE), _scaling("nesterov", 512)),),
        limits="The paper's 32,000 images are 2.5 % of ImageNet and leave 40 steps an epoch. By "
        "share of the data, 1,250 images of CIFAR-10 are as many, and 2,048 more. 32,768 would be "
        "66 % of CIFAR-10 and leave one step an epoch, which says nothing about the paper; the "
        "[table](#batch-sizes) has 8,192 and 32,768 without a verdict. The paper's Table 3 has "
        "24.0 % error at 32,000, 23.0 % at 1,600, and 23.9 % for the baseline.",
        beside=tuple(
            lose_at_most(MARGIN, _scaling("neumann", batch), _scaling("nesterov", 512))
            for batch in LARGER
        ),
    ),
    Claim(
        2,
        "Linear speed-up",
        "A larger batch reaches the same accuracy in as many epochs, so steps fall in proportion.",
        "section 1, Table 3",
        "`studies/paper/scaling-epochs.toml` and `studies/paper/scaling.toml`: whole runs of 15, "
        "30 and 60 epochs, each with its whole schedule; epochs to the mean accuracy of Nesterov "
        "SGD at 512 after 30, interpolated",
        "Supported if Neumann at 2,048 needs at most 1.14 times its epochs at 512, the largest "
        "ratio in Table 3; not supported if it needs more. The epochs are those of the mean over "
        "seeds, with a jackknife interval; a batch that never gets there counts as 60.",
        (
            EpochsToAccuracy(
                list_lengths("neumann", 512),
                list_lengths("neumann", LARGE),
                list_lengths("nesterov", 512)[TARGET_EPOCHS],
                EPOCH_FACTOR,
            ),
        ),
        limits="As for claim 1: by share of the data, 2,048 images are 1.6 times the paper's "
        "largest batch, and larger ones have no verdict. Seeds differ by more epochs than the 14 "
        "% that are to be shown, so five seeds may leave this open.",
    ),
    Claim(
        3,
        "Less error at equal epochs",
        "At a usual batch size and equal epochs, the error is 0.8 to 0.9 points below the tuned "
        "baseline's, for every network tried.",
        "Table 2",
        "`studies/paper/main-cifar10.toml` and `main-cifar100.toml`: Neumann, RMSProp and "
        "Nesterov SGD",
        "Supported if Neumann is ahead of both on both data sets. The claimed effect is 0.8 "
        "points, or 3.8 % of the baseline's error where that is less.",
        tuple(
            Contrast(
                Source(study, "neumann"),
                Source(study, baseline),
                claimed=GAIN,
                claimed_share=GAIN_SHARE,
            )
            for study in MAIN
            for baseline in BASELINES
        ),
        limits="Another data set and another network than the paper's.",
    ),
    Claim(
        4,
        "Fewer steps to the same accuracy",
        "Neumann reaches the baseline's accuracy in 10 to 30 % fewer steps.",
        "section 4.1",
        "`studies/paper/shorter-runs.toml`: Neumann for 70, 80, 90 and 100 % of the epochs, the "
        "baselines in whole runs, each with its whole schedule; the length at which Neumann is as "
        "accurate as a baseline, interpolated",
        "Supported if Neumann saves steps compared with both baselines, that is if it is ahead of "
        "them at equal length. The claimed effect is 10 % of the steps: not supported if Neumann "
        "is behind one of them at 90 % of the length.",
        tuple(
            StepsSaved(_shortened(), Source("shorter-runs", baseline), SAVED)
            for baseline in BASELINES
        ),
        limits="A tenth of the epochs costs any optimizer about 0.1 points here. The margin of 0.2 "
        "points, within which we call two things equal, would hide what is saved, so this claim "
        "has no margin.",
    ),
    Claim(
        5,
        "One number to tune",
        "With the values of Table 1, only the learning rate is left to choose.",
        "section 1, Table 1",
        "`studies/paper/sensitivity.toml`: α, β, γ and μ changed one at a time, at the learning "
        "rate tuned for Table 1",
        "Supported if no change gains more than 0.4 points on Table 1, half of what claim 3 "
        "promises; not supported if one does.",
        tuple(
            lose_at_most(
                WORTH_TUNING, Source("sensitivity", "neumann"), Source("sensitivity", changed)
            )
            for changed in (
                "α 1e-6",
                "γ 0.9",
                "γ 0.999",
                "μ 0.8",
                "μ 0.95",
                "β 1e-4",
            )
        ),
        limits="The warm-up and K are claims 14 and 13. 0.4 points are a large share of an error "
        "on CIFAR; with ImageNet's share, no number of seeds that we can afford would decide.",
    ),
    Claim(
        6,
        "The cost of Adam",
        "A step takes the computation and the memory of Adam.",
        "section 4",
        "`python -m benchmarks.step.time_optimizers`, two networks and two synthetic sets of "
        "tensors, on an H200",
        "Supported if the fused step takes no more time and state than torch's fused Adam, to 1 %.",
        measure=compare_cost_with_adam,
        limits="Our implementation, not the authors'. It takes less time on the device and no more "
        "state. By the clock a step of ResNet-50 takes longer, because Python handles 161 tensors "
        "while the GPU is idle. In a whole training step nothing is left of that: AdamW's takes "
        "1.01 × as long as ours. [Cost](cost.md) has all rows.",
    ),
    Claim(
        7,
        "Adam is clearly worse",
        "On these image models Adam ends well behind both Neumann and RMSProp.",
        "section 4.1",
        "`studies/paper/main-cifar10.toml` and `main-cifar100.toml`, the arm of Adam",
        "Supported if Neumann and RMSProp are ahead of Adam on both data sets; the claimed effect "
        "is at least 0.2 points.",
        tuple(
            Contrast(Source(study, arm), Source(study, "adam"))
            for study in MAIN
            for arm in ("neumann", "rmsprop")
        ),
        limits="All arms have the same L2 penalty, as was usual in 2017; AdamW is not tested here.",
    ),
    Claim(
        8,
        "The gain is not a lower training loss",
        "The error is lower although the training loss is not.",
        "section 4.1",
        "`studies/paper/main-cifar10.toml`: accuracy, and training loss over the last epoch",
        "Supported if Neumann is ahead of RMSProp and Nesterov SGD in accuracy, and its training "
        "loss is at most 20 % below theirs; not supported if it is behind by claim 3's measure or "
        "its loss is lower than that.",
        tuple(
            Contrast(
                Source(MAIN[0], "neumann"),
                Source(MAIN[0], baseline),
                claimed=GAIN,
                claimed_share=GAIN_SHARE,
            )
            for baseline in BASELINES
        )
        + tuple(
            lose_at_most(
                LOSS_MARGIN,
                Source(MAIN[0], "neumann"),
                Source(MAIN[0], baseline),
                get_log_train_loss,
            )
            for baseline in BASELINES
        ),
        limits="Neumann's training loss is that of the displaced weights, at which it takes its "
        "gradients.",
    ),
    Claim(
        9,
        "Oscillations early in training",
        "Accuracy and loss oscillate early in training, more than the baseline's.",
        "section 4.1, Figure 1",
        "`studies/paper/main-cifar10.toml`: the mean fall of the accuracy from epoch to epoch in "
        "the first third of a run, compared with RMSProp as in Figure 1, with BatchNorm statistics "
        "gathered at the weights that are evaluated",
        "Supported if it falls more with Neumann; the claimed effect is above zero.",
        (
            Contrast(
                Source(MAIN[0], "neumann"),
                Source(MAIN[0], "rmsprop"),
                measure_early_drops,
                claimed=0.0,
            ),
        ),
    ),
    Claim(
        10,
        "The regularizers help, but are not the whole gain",
        "Both regularizers together lower the error, and without them it is still below the "
        "baseline's.",
        "Table 4, Figure 5",
        "`studies/paper/regularizers.toml` at batch 4,096: Neumann, α = β = 0, α = 0, β = 0, "
        "Nesterov SGD",
        "Supported if Neumann is ahead of Neumann with α = β = 0, and the latter of Nesterov SGD. "
        "The claimed effects are 0.5 and 0.8 points, or 2.1 and 3.3 % of the error where that is "
        "less.",
        (
            Contrast(
                Source("regularizers", "neumann"),
                Source("regularizers", "no regularizers"),
                claimed=FORCES_GAIN,
                claimed_share=FORCES_SHARE,
            ),
            Contrast(
                Source("regularizers", "no regularizers"),
                Source("regularizers", "nesterov"),
                claimed=PLAIN_GAIN,
                claimed_share=PLAIN_SHARE,
            ),
        ),
        limits="The paper's baseline here is RMSProp.",
    ),
    Claim(
        11,
        "Cubic early, repulsion late",
        "The cubic term limits steps early in training; the repulsion takes over at the end.",
        "section 3.1",
        "`studies/paper/main-cifar10.toml`: both forces and the gradient's norm along every run",
        "Supported if in every run the cubic force is the larger one in the first third and the "
        "repulsion in the last; not supported if one of the two fails in every run.",
        measure=compare_forces,
        measured=(Source(MAIN[0], "neumann"),),
    ),
    Claim(
        12,
        "Single runs are enough",
        "Results hardly vary between initializations, so single runs can be reported.",
        "section 4, appendix C",
        "`studies/paper/main-cifar10.toml`: the spread of Neumann over ten seeds",
        "Supported if two single runs would show a difference of 0.8 points, that is if the "
        "standard deviation is below 0.29 points; not supported if it is above.",
        (Spread(Source(MAIN[0], "neumann"), GAIN),),
        limits="On CIFAR-10, 0.8 points are a large share of the error. For 3.8 % of it, which is "
        "what they are on ImageNet, the deviation would have to be several times smaller.",
    ),
    Claim(
        13,
        "A constant K works as well",
        "The interval between resets may be constant instead of doubling.",
        "section 3.2",
        "`studies/paper/reset-interval.toml`: doubling and constant, starting at 2.2, 4.4 and 8.8 "
        "%",
        "Supported if both, each as the mean over the three K, are within ±0.2 points of each "
        "other (two one-sided tests); not supported if they differ by more.",
        (
            Equivalence(
                tuple(Source("reset-interval", f"constant K {share}%") for share in INTERVALS),
                tuple(Source("reset-interval", f"doubling K {share}%") for share in INTERVALS),
            ),
        ),
        beside=tuple(
            Equivalence(
                (Source("reset-interval", f"constant K {share}%"),),
                (Source("reset-interval", f"doubling K {share}%"),),
            )
            for share in INTERVALS
        ),
    ),
    Claim(
        14,
        "An SGD burn-in helps",
        "A short phase of plain SGD at the start helps.",
        "section 3.2",
        "`studies/paper/warm-up.toml`: a warm-up of 2.2 % of the run against none; 10 % as well",
        "Supported if 2.2 % is ahead of none; the claimed effect is at least 0.2 points.",
        (Contrast(Source("warm-up", "2.2%"), Source("warm-up", "none")),),
    ),
    Claim(
        15,
        "Reusing a mini-batch pays less and less",
        "Every further step on the same mini-batch gives less.",
        "section 3.2",
        "`studies/paper/idealized.toml`: Algorithm 1 with K = 1, 3 and 8 at equal numbers of "
        "gradients, and K = 8 convexified",
        "Supported if K = 1 is ahead of K = 3, and K = 3 of K = 8; the claimed effects are at "
        "least 0.2 points.",
        tuple(
            Contrast(Source("idealized", f"K {few}"), Source("idealized", f"K {many}"))
            for few, many in ((1, 3), (3, 8))
        ),
    ),
    Claim(
        16,
        "Krylov methods are too slow",
        "Conjugate gradients and similar methods gain less from Hessian–vector products than these "
        "cost.",
        "section 2.1, appendix A",
        "`studies/paper/krylov.toml`: conjugate gradients with the Gauss–Newton matrix and with "
        "the Hessian, by the clock",
        "All take whole runs with their whole schedules, as many epochs as fit into about the "
        "same time, without compilation or CUDA graphs, which conjugate gradients cannot use "
        "here. Supported if in every seed Neumann ends with a lower loss on the test set than "
        "both, in at most 1.1 times their time; not supported if in every seed one of them ends "
        "with a lower loss, in at most 1.1 times Neumann's.",
        measure=race_conjugate_gradients,
        measured=tuple(Source("krylov", arm) for arm in RACE),
        limits="Our conjugate gradients; a faster solver may exist. Run it with --jobs 1.",
    ),
    Claim(
        17,
        "The largest eigenvalue grows almost linearly",
        "The largest eigenvalue of mini-batch Hessians grows along training, almost linearly.",
        "appendix A, Figure 4",
        "`python -m benchmarks.spectrum.along_training`: ResNet-9 on CIFAR-10, batch 128, 16 "
        "points, three mini-batches, converged",
        "Supported if, at a constant learning rate and over at least three seeds, it grows in "
        "both halves of a run and the halves' slopes are within a factor of two (two one-sided "
        "tests); not supported if they are not. The run that we have lets the learning rate fall "
        "to zero, and cannot decide.",
        measure=judge_growth,
        limits="One network, runs of ten epochs.",
    ),
    Claim(
        18,
        "The smallest eigenvalue tends to zero",
        "The most negative eigenvalue goes to zero along training.",
        "appendix A, Figure 4",
        "the same runs of `python -m benchmarks.spectrum.along_training`, with Lanczos runs to "
        "convergence instead of ten steps",
        "Supported if, at a constant learning rate and over at least three seeds, its magnitude "
        "falls by half or more over the last two thirds of every run, on a fitted line; not "
        "supported if it falls by less in every run. The run that we have lets the learning rate "
        "fall to zero, and cannot decide.",
        measure=follow_smallest,
        limits="One network, runs of ten epochs. In the run that we have, it goes down relative to "
        "λmax, which is what the paper's μ needs.",
    ),
    Claim(
        19,
        "Many large negative eigenvalues at the start",
        "A new network's Hessian has many large negative eigenvalues.",
        "section 3.1",
        "`python -m benchmarks.spectrum.at_initialization`: the density of eigenvalues of "
        "ResNet-9 for several draws of its weights",
        "Supported if each draw has at least ten eigenvalues below −10 % of λmax; not supported "
        "if none has.",
        measure=count_negative,
    ),
    Claim(
        20,
        "A shift helps to find the smallest eigenvalue",
        "Shifting the Hessian by λmax lets Lanczos find its most negative eigenvalue.",
        "appendix A",
        "an example and the reason, [Ten steps are not "
        "enough](spectrum.md#ten-steps-are-not-enough), which runs as a test",
        "Supported if the shift finds a λmin that the same number of steps does not find without "
        "it.",
        measure=state(
            Verdict.NOT_SUPPORTED,
            "the shifted Hessian has the same Krylov space, so Lanczos finds the same λmin, with "
            "the same error",
        ),
        limits="The shift does help the power method, and the shifted matrix does have λmin at "
        "the end of largest magnitude. To find λmin takes more steps, not a shift.",
    ),
    Claim(
        21,
        "A gradient at a displaced point carries curvature",
        "The gradient at the displaced point is the gradient plus a Hessian–vector product, to "
        "first order.",
        "section 2.2",
        "tests, in float64: `tests/theory/test_idealized.py` (exact on quadratics) and "
        "`tests/spectrum/operators/test_finite_differences.py` (networks)",
        "Supported if the tests confirm it.",
        measure=state(
            Verdict.SUPPORTED, "exact on quadratics, to second order in the step elsewhere"
        ),
    ),
    Claim(
        22,
        "The two loops flatten into Algorithm 2",
        "Algorithm 2 is the two-loop form with displaced weights stored, the same iteration.",
        "section 3.2",
        "tests, in float64: `tests/theory/test_two_loops.py`",
        "Supported if both give the same weights.",
        measure=state(
            Verdict.NOT_SUPPORTED,
            "not as printed: Algorithm 1 moves the weights once, by the last term, and Algorithm "
            "2 by every term",
        ),
        limits="Between resets Algorithm 2 is the inner loop whose weights move with every term. "
        "That is a different iteration. Which one trains better is another question.",
    ),
    Claim(
        23,
        "It gains more from large batches than SGD",
        "Larger batches suit the method: its advantage over SGD grows with the batch.",
        "section 3.2",
        "`studies/paper/small-batch.toml` (128) and `studies/paper/scaling.toml`: the difference "
        "from Nesterov SGD by batch size",
        "Supported if the difference grows from 128 to 2,048, on a line fitted to all batches for "
        "each seed; the claimed effect is at least 0.2 points.",
        (AdvantageByBatch(_by_batch("neumann"), _by_batch("nesterov")),),
    ),
    Claim(
        24,
        "CIFAR without any change",
        "The same values work on CIFAR-10 and CIFAR-100.",
        "section 4",
        "`studies/paper/main-cifar10.toml` and `main-cifar100.toml`, the arm with Table 1 to the "
        "letter: five epochs of warm-up, K from ten epochs on",
        "Supported if it loses less than 0.2 points to Nesterov SGD on both; not supported if it "
        "loses more on one.",
        tuple(
            lose_at_most(MARGIN, Source(study, "table 1"), Source(study, "nesterov"))
            for study in MAIN
        ),
        limits="The paper gives no figures for CIFAR, so we hold it to the usual optimizer.",
    ),
    Claim(
        25,
        "No gain with clipped gradients",
        "For a recurrent model whose gradients are clipped hard there is no gain.",
        "section 4.4",
        "`studies/paper/clipping.toml`: a GRU on text, beside Adam, at four clipping norms",
        "Supported if Neumann is at most 0.01 nats ahead of Adam at the two smallest norms; not "
        "supported if it is further ahead at one.",
        tuple(
            lose_at_most(
                NATS_MARGIN,
                Source("clipping", "adam", name_point(clip_grad=norm)),
                Source("clipping", "neumann", name_point(clip_grad=norm)),
                get_loss,
            )
            for norm in (0.05, 0.25)
        ),
        limits="A small GRU on text, not Tacotron.",
    ),
    Claim(
        26,
        "Better than LARS and linear scaling",
        "At large batches it beats LARS and SGD with a scaled learning rate.",
        "section 4.2",
        "`studies/paper/scaling.toml` at 2,048: LARS, and Nesterov SGD with its learning rate "
        "tuned at this batch",
        "Supported if Neumann is ahead of both. The claimed effect is 0.4 points for LARS, or 1.6 "
        "% of the error where that is less, and at least 0.2 for SGD.",
        (
            Contrast(
                _scaling("neumann", LARGE),
                _scaling("lars", LARGE),
                claimed=LARS_LOSS,
                claimed_share=LARS_SHARE,
            ),
            Contrast(_scaling("neumann", LARGE), _scaling("nesterov", LARGE)),
        ),
        limits="A rate tuned at each batch is a stronger baseline than linear scaling. Batches "
        "beyond the paper's share of the data have no verdict, as for claim 1.",
        beside=tuple(
            Contrast(_scaling("neumann", batch), _scaling(other, batch))
            for batch in LARGER
            for other in ("lars", "nesterov")
        ),
    ),
    Claim(
        27,
        "Accumulation changes nothing",
        "Gradients accumulated over micro-batches, or computed by many devices, train alike.",
        "section 4.2",
        "`studies/paper/accumulation.toml`: a batch of 4,096 at once and in eight parts; tests of "
        "two and four processes compare weights with those of one",
        "Supported if the accuracies are within ±0.2 points of each other (two one-sided tests); "
        "not supported if they differ by more.",
        (
            Equivalence(
                (Source("accumulation", "accumulated"),), (Source("accumulation", "whole"),)
            ),
        ),
    ),
    Claim(
        28,
        "The figures on ImageNet",
        "The errors and epochs of Tables 2 to 4 themselves.",
        "Tables 2 to 4",
        "nothing: recipes for the four networks and their baselines in `studies/imagenet`, ready "
        "for a folder of ImageNet",
        "Needs ImageNet and many GPU days.",
        measure=state(Verdict.NOT_TESTABLE, "we have no ImageNet here"),
    ),
)

CLAIMS_ON_TEST_SET = (1, 2, 3, 4, 5, 7, 8, 9, 10, 12, 13, 14, 15, 23, 24, 25, 26, 27)
