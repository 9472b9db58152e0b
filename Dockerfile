# shoal with all that trains on a CPU; the demo runs when nothing else is said.
#   docker build -t shoal . && docker run --rm -v "$PWD/runs:/home/shoal/runs" shoal
FROM python:3.11-slim

WORKDIR /opt/shoal
COPY requirements ./requirements
RUN pip install --no-cache-dir -r requirements/torch.txt -c requirements/constraints.txt
COPY pyproject.toml README.md LICENSE NOTICE ./
COPY src ./src
RUN pip install --no-cache-dir -c requirements/constraints.txt ".[train,llm,parallel,vision,web]" \
    && useradd --create-home shoal

USER shoal
WORKDIR /home/shoal
ENTRYPOINT ["shoal"]
CMD ["train", "--config-name", "demo"]
