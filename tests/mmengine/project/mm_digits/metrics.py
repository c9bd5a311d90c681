from mmengine.evaluator import BaseMetric

from .registry import METRICS


@METRICS.register_module()
class Accuracy(BaseMetric):
    default_prefix = "digits"

    def process(self, data_batch, data_samples):
        for sample in data_samples:
            self.results.append((int(sample["sample_idx"]), sample["pred_label"], sample["gt_label"]))

    def compute_metrics(self, results):
        right = sum(int(predicted) == int(label) for _, predicted, label in results)
        return dict(accuracy=100.0 * right / len(results), count=len(results), first=results[0][0], last=results[-1][0])


@METRICS.register_module()
class Recall(BaseMetric):
    """Recall of each class that there is; asks the dataset for the names."""

    def process(self, data_batch, data_samples):
        self.results += [(int(sample["gt_label"]), int(sample["pred_label"])) for sample in data_samples]

    def evaluate(self, size):
        metrics = super().evaluate(size)
        return {**metrics, "size": size}

    def compute_metrics(self, results):
        metrics = {}
        for index, name in enumerate(self.dataset_meta["classes"]):
            found = [predicted == label for label, predicted in results if label == index]
            if found:
                metrics[name] = sum(found) / len(found)
        return metrics
