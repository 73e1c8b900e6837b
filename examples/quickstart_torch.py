import torch
import torch.distributed as dist

dist.init_process_group("allfold")
tensor = torch.full((4,), dist.get_rank() + 1.0)
dist.all_reduce(tensor)
print(f"rank {dist.get_rank()} of {dist.get_world_size()}: {tensor.tolist()}")
dist.destroy_process_group()
