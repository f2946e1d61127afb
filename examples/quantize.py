"""Quantizes a checkpoint and loads the result: `python examples/quantize.py s3://models/smollm2 smollm2-w4`."""

import argparse

from bitmill import InferenceClient, QuantizerClient
from bitmill.quantizer.v1.quantization_job_pb2 import JobPhase, JobState


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source_uri")
    parser.add_argument("artifact_name")
    parser.add_argument("--scheme", default="W4A16")
    parser.add_argument("--group-size", type=int)
    parser.add_argument("--num-samples", type=int, default=32)
    parser.add_argument("--max-sequence-length", type=int, default=512)
    parser.add_argument("--quantizer", default="127.0.0.1:50051")
    parser.add_argument("--inference", default="127.0.0.1:50052")
    arguments = parser.parse_args()
    grouping = {} if arguments.group_size is None else {"group_size": arguments.group_size}
    with QuantizerClient(arguments.quantizer) as quantizer:
        job = quantizer.quantize(
            arguments.source_uri,
            arguments.artifact_name,
            scheme=arguments.scheme,
            num_samples=arguments.num_samples,
            max_sequence_length=arguments.max_sequence_length,
            **grouping,
        )
        for event in quantizer.watch(job.job_id):
            progress = event.job.progress
            running = event.job.state == JobState.JOB_STATE_RUNNING and event.job.phase
            step = JobPhase.Name(event.job.phase) if running else JobState.Name(event.job.state)
            print(step, *((progress.completed, progress.total, progress.unit) if progress.unit else ()))
        job = quantizer.wait(job.job_id)  # Raises JobNotSucceededError with the reason when it failed.
        evaluation = quantizer.artifact(job.artifact_uri).evaluation
        print(f"perplexity {evaluation.source_perplexity:.2f} -> {evaluation.artifact_perplexity:.2f}")
    with InferenceClient(arguments.inference) as inference:
        model = inference.load_model(job.artifact_uri)
        print(f"{model.name} serves")


if __name__ == "__main__":
    main()
