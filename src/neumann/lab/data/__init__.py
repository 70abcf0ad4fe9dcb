"""Data sets by name, and the batches they give.

A loader turns a `Request` into a `Dataset`: one source of batches to train on and one to test on.

load            the table of data sets: add one there
dataset         `Request` and `Dataset`
plan            which examples go into which batch
image_sets      loaders of small image sets, kept on the device by `device_images`
augmentation    flips, shifts and cutout of such images
image_folder    folders of images, as ImageNet has them
text            text files, read as characters, bytes or BPE tokens
windows         the examples of a tokenized text
documents       the documents of text files, and the sets they belong to
tokens          bytes and BPE
token_cache     the file of tokens next to a text
"""

from neumann.lab.data.dataset import Dataset, Source
from neumann.lab.data.load import hash_data, load
from neumann.lab.data.plan import Plan

__all__ = ["Dataset", "Plan", "Source", "hash_data", "load"]
