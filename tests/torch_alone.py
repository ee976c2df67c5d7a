"""Training in torch alone, for runs to be compared with."""


def groups_of(model, weight_decay):
    """The groups of a torch optimizer: matrices decay, the rest does not."""
    matrices = [parameter for parameter in model.parameters() if parameter.ndim >= 2]
    rest = [parameter for parameter in model.parameters() if parameter.ndim < 2]
    groups = [{"params": matrices, "weight_decay": weight_decay}]
    if rest:
        groups.append({"params": rest, "weight_decay": 0.0})
    return groups


def train_alone(task, model, optimizer, num_steps, schedule=None, seed=0):
    """Take steps on the batches of the only worker, one after the other."""
    data = task.data(seed)
    for index in range(num_steps):
        batch = data.batch(0, index)
        optimizer.zero_grad()
        outputs = task.outputs(model, batch)
        loss = task.loss(outputs, batch)
        loss.backward()
        optimizer.step()
        if schedule is not None:
            schedule.step()
