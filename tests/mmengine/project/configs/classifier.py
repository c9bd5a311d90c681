_base_ = ["./_base_/digits.py", "./_base_/runtime.py", "./_base_/schedule.py"]

model = dict(
    type="Classifier",
    data_preprocessor=dict(type="ImgDataPreprocessor", mean=[8.0], std=[5.0]),
    backbone=dict(type="Backbone", channels=8, depth=2),
    head=dict(type="mm_digits.Head", channels=8),
)
tta_model = dict(type="DigitTTA")
