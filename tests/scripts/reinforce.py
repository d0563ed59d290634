"""Policy gradients: single observations in, actions sampled from the outputs."""

import torch
from torch import nn
from torch.distributions import Categorical


class Policy(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = nn.Linear(4, 32)
        self.actor = nn.Linear(32, 2)
        self.critic = nn.Linear(32, 1)

    def forward(self, observation):
        hidden = torch.relu(self.body(observation))
        return Categorical(logits=self.actor(hidden)), self.critic(hidden)


class Bandit:
    """The right action is the sign of the observation's sum."""

    def reset(self):
        self.observation = torch.randn(4)
        return self.observation

    def step(self, action):
        reward = 1.0 if action == int(self.observation.sum() > 0) else 0.0
        return self.reset(), reward


def main():
    torch.manual_seed(0)
    policy, bandit = Policy(), Bandit()
    optimizer = torch.optim.Adam(policy.parameters(), lr=1e-2)
    observation = bandit.reset()
    average = 0.5
    for episode in range(25):
        log_probs, values, rewards = [], [], []
        for _ in range(10):
            distribution, value = policy(observation)
            action = distribution.sample()
            log_probs.append(distribution.log_prob(action))
            values.append(value.squeeze())
            observation, reward = bandit.step(action.item())
            rewards.append(reward)
        returns, values = torch.tensor(rewards), torch.stack(values)
        advantage = returns - values.detach()
        loss = -(torch.stack(log_probs) * advantage).mean() + (returns - values).pow(2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        average = 0.9 * average + 0.1 * sum(rewards) / len(rewards)
    print(f"episodes {episode + 1}")
    print(f"final loss {1 - average:.6f}")


if __name__ == "__main__":
    main()
