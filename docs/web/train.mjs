// Training in JavaScript, from a folder of `graphgen artifacts MODEL -o ART --web FOLDER`.
//
// The runtime may be onnxruntime-web or onnxruntime-node. Their sessions take arrays and return
// arrays, so a step is two runs: gradients out of step.onnx, the next state out of update.onnx.

/** The tensors of a file of safetensors: an object of `ort.Tensor`, all float32. */
export function readState(ort, buffer) {
  const length = Number(new DataView(buffer).getBigUint64(0, true));
  const header = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 8, length)));
  const state = {};
  for (const [name, { shape, data_offsets: [start, end] }] of Object.entries(header)) {
    const data = new Float32Array(buffer.slice(8 + length + start, 8 + length + end));
    state[name] = new ort.Tensor('float32', data, shape);
  }
  return state;
}

/** The bytes of a file of safetensors with these tensors. */
export function writeState(state) {
  const header = {};
  let size = 0;
  for (const [name, { dims, data }] of Object.entries(state)) {
    header[name] = {
      dtype: 'F32', shape: [...dims], data_offsets: [size, size + data.byteLength],
    };
    size += data.byteLength;
  }
  let text = JSON.stringify(header);
  while (new TextEncoder().encode(text).length % 8) text += ' ';
  const bytes = new TextEncoder().encode(text);
  const file = new Uint8Array(8 + bytes.length + size);
  new DataView(file.buffer).setBigUint64(0, BigInt(bytes.length), true);
  file.set(bytes, 8);
  for (const [name, { data }] of Object.entries(state)) {
    const at = 8 + bytes.length + header[name].data_offsets[0];
    file.set(new Uint8Array(data.buffer, data.byteOffset, data.byteLength), at);
  }
  return file;
}

/** A tensor of a number or nested lists, of int64 as tokens and labels are, or float32. */
export function tensor(ort, rows, type = 'int64') {
  const dims = [];
  for (let inner = rows; Array.isArray(inner); [inner] = inner) dims.push(inner.length);
  const flat = Array.isArray(rows) ? rows.flat(Infinity) : [rows];
  const data = type === 'int64' ? BigInt64Array.from(flat, BigInt) : Float32Array.from(flat);
  return new ort.Tensor(type, data, dims);
}

export class Trainer {
  /** Open a folder; `read(name)` gives the ArrayBuffer of a file in it. */
  static async open(ort, read, { seed = 0, ...options } = {}) {
    const trainer = new Trainer();
    Object.assign(trainer, { ort, seed, updates: 0 });
    trainer.state = readState(ort, await read('state.safetensors'));
    const settings = { graphOptimizationLevel: 'disabled', enableMemPattern: false, ...options };
    for (const name of ['step', 'update', 'eval']) {
      const model = new Uint8Array(await read(`${name}.onnx`));
      trainer[name] = await ort.InferenceSession.create(model, settings);
    }
    return trainer;
  }

  /** Update the state by the gradients of a batch, tensors by name; return the loss before it. */
  async train(batch, rate) {
    const { loss, gradients } = await this.gradients(batch);
    const given = {
      ...this.state,
      ...gradients,
      learning_rate: new this.ort.Tensor('float32', [rate], []),
      update_number: new this.ort.Tensor('int64', [BigInt(++this.updates)], []),
    };
    const made = await this.update.run(this.only(this.update, given));
    for (const name of Object.keys(this.state)) this.state[name] = made[`${name}_next`];
    return loss;
  }

  async gradients(batch) {
    const step = this.updates; // with the seed, this is what dropout depends on
    const numbers = { seed: tensor(this.ort, this.seed), step: tensor(this.ort, step) };
    const given = this.only(this.step, { ...this.state, ...batch, ...numbers });
    const gradients = await this.step.run(given);
    const [name] = this.step.outputNames;
    return { loss: gradients[name].data[0], gradients };
  }

  /** The loss of a batch, without dropout. */
  async evaluate(batch) {
    const made = await this.eval.run(this.only(this.eval, { ...this.state, ...batch }));
    return made[this.eval.outputNames[0]].data[0];
  }

  only(session, given) {
    return Object.fromEntries(session.inputNames.map((name) => [name, given[name]]));
  }
}
